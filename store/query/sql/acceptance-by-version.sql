-- acceptance rate by drafter updates in service, in the order of service; each adapter counts its own updates
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
