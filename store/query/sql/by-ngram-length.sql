-- acceptance rate by the number of drafter pieces merged into one target token, and probabilities of the first level
SELECT
    run,
    pieces_count AS pieces,
    sum(decisions)::BIGINT AS judged,
    coalesce(sum(decisions) FILTER (outcome = 'accepted'), 0)::BIGINT AS accepted,
    accepted / judged AS acceptance_rate,
    sum(target_level_sum) / judged AS mean_first_level_target,
    sum(drafter_level_sum) / judged AS mean_first_level_drafter
FROM counts_by_place
WHERE outcome IN ('accepted', 'rejected') AND drafter = 'model'
GROUP BY run, pieces_count
ORDER BY run, pieces;
