SELECT run, target, pieces_count AS pieces, sum(decisions)::BIGINT AS judged,
    coalesce(sum(decisions) FILTER (outcome = 'accepted'), 0)::BIGINT AS accepted
FROM counts_by_place
WHERE outcome IN ('accepted', 'rejected') AND drafter = 'model' AND pieces_count > 0 GROUP BY ALL
