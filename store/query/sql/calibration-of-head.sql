-- the head's estimate in ten buckets, and the share of tokens for which everything up to the token was accepted
WITH outcomes AS (
    SELECT
        run,
        least(floor(head_estimate::DOUBLE * 10), 9)::INTEGER AS bucket,
        head_estimate::DOUBLE AS estimate,
        outcome = 'accepted' AS accepted
    FROM decisions
    -- a token after a rejection counts as not accepted: the estimate covers the whole prefix
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
