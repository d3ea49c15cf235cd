SELECT run, "offset", target, dataset, detector, changed_at, rate_before, rate_after, action,
    description, count(*) OVER () AS total
FROM drifts
