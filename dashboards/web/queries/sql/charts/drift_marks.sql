SELECT run, "offset", target, dataset, detector, direction, changed_at, rate_before, rate_after, action,
    signal, count(*) OVER () AS total
FROM drifts
