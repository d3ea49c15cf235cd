-- The time of a window starts at the end of all windows before it, because prompts overlap and windows must not.
WITH windows AS (
    SELECT run, {part} AS part, "offset" // {window} AS number,
        min("offset") AS first, max("offset") AS last, count(*) AS prompts,
        sum(judged)::BIGINT AS judged, sum(accepted)::BIGINT AS accepted,
        sum(emitted) AS emitted, sum(blocks) AS blocks, min(started) AS started, max(finished) AS finished
    FROM prompts GROUP BY ALL
),
timed AS (
    SELECT *, coalesce(max(finished) OVER before, started) AS entered
    FROM windows
    WINDOW before AS (PARTITION BY run, part ORDER BY number ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
)
SELECT run, part, first, last, prompts, judged, accepted,
    emitted / nullif(blocks, 0) AS efficiency,
    CASE WHEN finished > entered THEN emitted / (finished - entered) END AS speed
FROM timed ORDER BY run, part, number
