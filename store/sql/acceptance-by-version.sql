-- acceptance rate under each drafter version, in the order in which they served
SELECT
    run,
    drafter_version,
    min("offset") AS first_offset,
    max("offset") AS last_offset,
    count(*) FILTER (outcome IN ('accepted', 'rejected')) AS judged,
    count(*) FILTER (outcome = 'accepted') AS accepted,
    accepted / nullif(judged, 0) AS acceptance_rate
FROM decisions
WHERE drafter = 'model'
GROUP BY run, drafter_version
ORDER BY run, drafter_version;
