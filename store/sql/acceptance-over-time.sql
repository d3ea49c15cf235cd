-- acceptance rate per window of 20 prompts of each dataset, with the drifts and versions that fall into it
WITH numbered AS (
    SELECT *, (row_number() OVER (PARTITION BY run, dataset ORDER BY "offset") - 1) // 20 AS prompt_window
    FROM prompts
),

windows AS (
    SELECT
        run,
        dataset,
        prompt_window,
        min("offset") AS first_offset,
        max("offset") AS last_offset,
        count(*) AS prompts,
        sum(accepted) / nullif(sum(judged), 0) AS acceptance_rate,
        sum(accepted) / nullif(sum(blocks - lookup_blocks), 0) AS mean_accepted_length,
        sum(emitted) / nullif(sum(blocks), 0) AS block_efficiency
    FROM numbered
    GROUP BY ALL
),

drift_marks AS (
    SELECT
        windows.run,
        windows.dataset,
        prompt_window,
        string_agg(
            format('{} at {} ({}, {:.2f} to {:.2f})', direction, drifts."offset", action, rate_before, rate_after),
            '; ' ORDER BY drifts."offset", seq
        ) AS drifts
    FROM windows
    JOIN drifts
        ON drifts.run = windows.run AND drifts.dataset = windows.dataset
        AND drifts."offset" BETWEEN first_offset AND last_offset
    GROUP BY ALL
),

version_marks AS (
    SELECT
        numbered.run,
        numbered.dataset,
        prompt_window,
        string_agg(format('{} at {} ({})', version, versions."offset", reason), '; ' ORDER BY version) AS versions
    FROM versions
    JOIN numbered ON numbered.run = versions.run AND numbered."offset" = versions."offset"
    GROUP BY ALL
)

SELECT
    run,
    dataset,
    first_offset,
    last_offset,
    windows.prompts,
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
