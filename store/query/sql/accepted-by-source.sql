-- accepted tokens by source (model, lookup, memory): candidates, acceptance, share of all emitted tokens, per forward
WITH counted AS (
    SELECT
        run,
        drafter AS source,
        coalesce(sum(decisions) FILTER (outcome NOT IN ('undrafted', 'untranslatable')), 0)::BIGINT AS candidates,
        coalesce(sum(decisions) FILTER (outcome IN ('accepted', 'rejected')), 0)::BIGINT AS judged,
        coalesce(sum(decisions) FILTER (outcome = 'alternative'), 0)::BIGINT AS alternatives,
        coalesce(sum(decisions) FILTER (outcome = 'accepted'), 0)::BIGINT AS accepted,
        -- each emits one token: an accepted one, the residual after a rejection, or the bonus
        sum(sum(decisions) FILTER (outcome IN ('accepted', 'rejected', 'undrafted'))) OVER (PARTITION BY run) AS emitted
    FROM counts_by_version
    GROUP BY run, drafter
),

forwards AS (
    SELECT run, count(*) AS target_forwards
    FROM blocks
    GROUP BY run
)

SELECT
    run,
    source,
    candidates,
    judged,
    alternatives,
    accepted,
    accepted / nullif(judged, 0) AS acceptance_rate,
    accepted / emitted AS share_of_emitted,
    accepted / target_forwards AS accepted_per_forward
FROM counted
LEFT JOIN forwards USING (run)
WHERE candidates > 0
ORDER BY run, accepted DESC, source;
