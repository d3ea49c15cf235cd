-- acceptance rate per window of 20 prompts of each dataset (more from 10,000 on), with drifts and published versions
WITH sizes AS (
    SELECT run, dataset, count(*) AS size
    FROM prompts
    GROUP BY ALL
),

-- neighbouring prompts are grouped if there are very many, so that few are sorted; up to 10,000 of a dataset are not
neighbours AS (
    SELECT
        run,
        dataset,
        any_value(size) AS size,
        min("offset") AS first_offset,
        max("offset") AS last_offset,
        count(*) AS prompts,
        sum(accepted) AS accepted,
        sum(judged) AS judged,
        sum(blocks) AS blocks,
        sum(lookup_blocks) AS lookup_blocks,
        sum(emitted) AS emitted
    FROM prompts
    JOIN sizes USING (run, dataset)
    GROUP BY run, dataset, "offset" // greatest(1, size // 5000)
),

-- at most 500 windows of a dataset
numbered AS (
    SELECT
        *,
        (sum(prompts) OVER (PARTITION BY run, dataset ORDER BY first_offset) - 1)
        // greatest(20, ceil(size / 500))::BIGINT AS prompt_window
    FROM neighbours
),

windows AS (
    SELECT
        run,
        dataset,
        prompt_window,
        min(first_offset) AS first_offset,
        max(last_offset) AS last_offset,
        sum(prompts)::BIGINT AS prompts,
        sum(judged)::BIGINT AS judged,
        sum(accepted)::BIGINT AS accepted,
        sum(accepted) / nullif(sum(judged), 0) AS acceptance_rate,
        sum(accepted) / nullif(sum(blocks - lookup_blocks), 0) AS mean_accepted_length,
        sum(emitted) / nullif(sum(blocks), 0) AS block_efficiency
    FROM numbered
    GROUP BY run, dataset, prompt_window
),

drift_marks AS (
    SELECT
        windows.run,
        windows.dataset,
        prompt_window,
        string_agg(description, '. ' ORDER BY drifts."offset", seq) AS drifts
    FROM windows
    JOIN drifts
        ON drifts.run = windows.run AND drifts.dataset = windows.dataset
        AND drifts."offset" BETWEEN first_offset AND last_offset
    GROUP BY ALL
),

version_marks AS (
    SELECT
        windows.run,
        windows.dataset,
        prompt_window,
        string_agg(format('{} at {} ({})', version, versions."offset", reason), '; ' ORDER BY version) AS versions
    FROM versions
    JOIN prompts ON prompts.run = versions.run AND prompts."offset" = versions."offset"
    JOIN windows
        ON windows.run = versions.run AND windows.dataset = prompts.dataset
        AND versions."offset" BETWEEN first_offset AND last_offset
    GROUP BY ALL
)

SELECT
    run,
    dataset,
    first_offset,
    last_offset,
    windows.prompts,
    judged,
    accepted,
    acceptance_rate,
    bar(acceptance_rate, 0, 1, 20) AS curve,
    mean_accepted_length,
    block_efficiency,
    drift_marks.drifts,
    version_marks.versions
FROM windows
LEFT JOIN drift_marks USING (run, dataset, prompt_window)
LEFT JOIN version_marks USING (run, dataset, prompt_window)
ORDER BY run, first_offset;
