-- acceptance rate by drafter and the index of the token in its block, and how often a block gets that far
SELECT
    run,
    drafter,
    index,
    count(*) FILTER (outcome <> 'undrafted') AS proposed_or_drafted,
    count(*) FILTER (outcome IN ('accepted', 'rejected')) AS judged,
    count(*) FILTER (outcome = 'accepted') AS accepted,
    accepted / nullif(judged, 0) AS acceptance_rate
FROM decisions
GROUP BY run, drafter, index
ORDER BY run, drafter, index;
