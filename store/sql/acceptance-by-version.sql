-- acceptance rate under each drafter version, in the order in which they served; adapters count for themselves
SELECT
    run,
    target,
    drafter_version,
    min("offset") AS first_offset,
    max(last_offset) AS last_offset,
    coalesce(sum(decisions) FILTER (outcome IN ('accepted', 'rejected')), 0)::BIGINT AS judged,
    coalesce(sum(decisions) FILTER (outcome = 'accepted'), 0)::BIGINT AS accepted,
    accepted / nullif(judged, 0) AS acceptance_rate
FROM counts_by_version
WHERE drafter = 'model'
GROUP BY run, target, drafter_version
ORDER BY run, target, drafter_version;
