-- Metrics per dataset, per target and in total, for all prompts and for their first and last fifth. One run.
--
-- A second of wall-clock time with n prompts in flight counts 1/n for each of them, so that the shares of overlapping
-- prompts add up to the wall-clock time. Time between prompts, such as learning, counts for the next prompt.
WITH entered AS (
    SELECT
        *,
        least(started, coalesce(
            max(finished) OVER (ORDER BY started, "offset" ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING),
            started
        )) AS entered
    FROM prompts
),

steps AS (
    SELECT moment, sum(change) AS change
    FROM (
        SELECT entered AS moment, 1 AS change FROM entered
        UNION ALL
        SELECT finished AS moment, -1 AS change FROM entered
    )
    GROUP BY moment
),

changes AS (
    SELECT
        moment,
        moment - lag(moment) OVER (ORDER BY moment) AS seconds,
        -- prompts in flight between the previous moment and this one
        sum(change) OVER (ORDER BY moment ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS in_flight
    FROM steps
),

clock AS (
    SELECT moment, sum(CASE WHEN in_flight > 0 THEN seconds / in_flight ELSE 0 END) OVER (ORDER BY moment) AS share
    FROM changes
),

stages AS (
    SELECT
        "offset",
        sum(seconds_decode::DOUBLE) AS decode,
        sum(seconds_translate::DOUBLE) AS translate,
        sum(seconds_verify::DOUBLE) AS verify
    FROM blocks
    GROUP BY "offset"
),

learning AS (
    SELECT prompts."offset", sum(updates.seconds::DOUBLE) AS learn
    FROM updates
    ASOF JOIN prompts ON updates."offset" >= prompts."offset"
    GROUP BY prompts."offset"
),

measured AS (
    SELECT entered.*, leaving.share - entering.share AS seconds, decode, translate, verify, learn
    FROM entered
    JOIN clock AS entering ON entering.moment = entered
    JOIN clock AS leaving ON leaving.moment = finished
    LEFT JOIN stages USING ("offset")
    LEFT JOIN learning USING ("offset")
),

groups AS (
    SELECT 'dataset' AS kind, dataset AS name, * FROM measured
    UNION ALL
    SELECT 'target' AS kind, target AS name, * FROM measured
    UNION ALL
    SELECT 'totals' AS kind, NULL AS name, * FROM measured
),

ranked AS (
    SELECT
        *,
        row_number() OVER (PARTITION BY kind, name ORDER BY "offset") AS rank,
        count(*) OVER (PARTITION BY kind, name) AS members,
        ceil(members / 5) AS fifth
    FROM groups
),

sections AS (
    SELECT 'all' AS section, * FROM ranked
    UNION ALL
    SELECT 'first_fifth' AS section, * FROM ranked WHERE rank <= fifth
    UNION ALL
    SELECT 'last_fifth' AS section, * FROM ranked WHERE rank > members - fifth
)

SELECT
    kind,
    name,
    section,
    count(*) AS prompts,
    sum(emitted)::BIGINT AS emitted_tokens,
    sum(blocks)::BIGINT AS target_forwards,
    sum(emitted) / nullif(sum(seconds), 0) AS tokens_per_second,
    coalesce(sum(decode), 0) AS decode,
    coalesce(sum(translate), 0) AS translate,
    coalesce(sum(verify), 0) AS verify,
    coalesce(sum(learn), 0) AS learn,
    sum(seconds) AS seconds,
    sum(accepted)::BIGINT AS accepted,
    sum(judged)::BIGINT AS judged,
    sum(accepted) / nullif(sum(blocks - lookup_blocks), 0) AS mean_accepted_length,
    sum(emitted) / nullif(sum(blocks), 0) AS block_efficiency,
    sum(lookup_blocks) / nullif(sum(blocks), 0) AS lookup_share,
    sum(lookup_accepted) / nullif(sum(lookup_judged), 0) AS lookup_acceptance_rate
FROM sections
GROUP BY kind, name, section
ORDER BY min("offset"), section;
