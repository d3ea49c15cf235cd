-- the adaptive head's estimate, in ten buckets, beside how often everything up to that token was in fact accepted
WITH outcomes AS (
    SELECT
        run,
        least(floor(head_estimate::DOUBLE * 10), 9)::INTEGER AS bucket,
        head_estimate::DOUBLE AS estimate,
        outcome = 'accepted' AS accepted
    FROM decisions
    -- what lies behind a rejection counts as not accepted: the estimate is about the whole prefix
    WHERE head_estimate IS NOT NULL AND outcome IN ('accepted', 'rejected', 'unjudged')
)

SELECT
    run,
    bucket / 10 AS estimate_from,
    (bucket + 1) / 10 AS estimate_to,
    count(*) AS decisions,
    avg(estimate) AS mean_estimate,
    avg(accepted::INTEGER) AS accepted_fraction,
    mean_estimate - accepted_fraction AS overestimate
FROM outcomes
GROUP BY run, bucket
ORDER BY run, bucket;
