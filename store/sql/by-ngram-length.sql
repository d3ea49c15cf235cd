-- acceptance rate by the number of drafter pieces that were merged into one target token
SELECT
    run,
    len(pieces) AS pieces,
    count(*) AS judged,
    count(*) FILTER (outcome = 'accepted') AS accepted,
    accepted / judged AS acceptance_rate,
    avg(target_levels[1]::DOUBLE) AS mean_target_probability,
    avg(drafter_levels[1]::DOUBLE) AS mean_drafter_probability
FROM decisions
WHERE outcome IN ('accepted', 'rejected') AND drafter = 'model'
GROUP BY run, len(pieces)
ORDER BY run, pieces;
