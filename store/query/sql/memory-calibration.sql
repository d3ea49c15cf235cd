-- the estimated chance of tree candidates in ten buckets by source, and the share of the judged ones that was accepted
WITH judged AS (
    SELECT
        run,
        drafter AS source,
        -- a chance is stored as a float32, which may be just below a bucket's beginning
        least(trunc(round(chance::DOUBLE, 6) * 10), 9)::INTEGER AS bucket,
        chance::DOUBLE AS chance,
        outcome = 'accepted' AS accepted
    FROM decisions
    -- an alternative was not accepted: one number decided about all candidates of its place
    WHERE chance IS NOT NULL AND outcome IN ('accepted', 'rejected', 'alternative')
)

SELECT
    run,
    source,
    bucket / 10 AS chance_from,
    (bucket + 1) / 10 AS chance_to,
    count(*) AS judged,
    count(*) FILTER (accepted) AS accepted,
    avg(chance) AS mean_chance,
    avg(accepted::INTEGER) AS accepted_fraction,
    mean_chance - accepted_fraction AS overestimate
FROM judged
GROUP BY run, source, bucket
ORDER BY run, source, bucket;
