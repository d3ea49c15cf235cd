-- acceptance rate by the number of drafter pieces that were merged into one target token
SELECT
    run,
    pieces_count AS pieces,
    sum(decisions)::BIGINT AS judged,
    coalesce(sum(decisions) FILTER (outcome = 'accepted'), 0)::BIGINT AS accepted,
    accepted / judged AS acceptance_rate,
    sum(target_level_sum) / judged AS mean_target_probability,
    sum(drafter_level_sum) / judged AS mean_drafter_probability
FROM counts_by_place
WHERE outcome IN ('accepted', 'rejected') AND drafter = 'model'
GROUP BY run, pieces_count
ORDER BY run, pieces;
