-- acceptance rate by draft source and index of the token or tree candidate in its block, with the number at that index
SELECT
    run,
    drafter,
    index,
    coalesce(sum(decisions) FILTER (outcome NOT IN ('undrafted', 'untranslatable')), 0)::BIGINT AS candidates,
    coalesce(sum(decisions) FILTER (outcome IN ('accepted', 'rejected')), 0)::BIGINT AS judged,
    -- of a tree: not accepted; the rejection of its place, if there is one, is counted at another index
    coalesce(sum(decisions) FILTER (outcome = 'alternative'), 0)::BIGINT AS alternatives,
    coalesce(sum(decisions) FILTER (outcome = 'accepted'), 0)::BIGINT AS accepted,
    accepted / nullif(judged, 0) AS acceptance_rate
FROM counts_by_place
GROUP BY run, drafter, index
HAVING candidates > 0
ORDER BY run, drafter, index;
