-- Counts and rates of each run, and the seconds that its newest answers took.
WITH newest AS (
    SELECT run, finished - started AS seconds FROM prompts
    QUALIFY row_number() OVER (PARTITION BY run ORDER BY finished DESC) <= 200
),

answers AS (
    SELECT run, count(*) AS newest, median(seconds) AS median_seconds, quantile_cont(seconds, .99) AS p99_seconds
    FROM newest GROUP BY run
)

SELECT run, count(*) AS prompts, list_sort(list(DISTINCT target)) AS targets, sum(emitted)::BIGINT AS tokens,
    sum(accepted)::BIGINT AS accepted, sum(judged)::BIGINT AS judged,
    sum(lookup_blocks) / nullif(sum(blocks), 0) AS copied_share,
    sum(emitted) / nullif(sum(blocks), 0) AS efficiency,
    sum(emitted) / nullif(max(finished) - min(started), 0) AS speed,
    any_value(newest) AS newest, any_value(median_seconds) AS median_seconds, any_value(p99_seconds) AS p99_seconds
FROM prompts JOIN answers USING (run) GROUP BY run
