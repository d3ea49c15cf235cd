-- every drift alarm: position, estimated start of the change, direction, rates and response
SELECT
    run,
    "offset",
    target,
    dataset,
    detector,
    signal,
    direction,
    changed_at,
    rate_before,
    rate_after,
    rate_after - rate_before AS change,
    action,
    action IN ('reset', 'recall') AS acted_upon
FROM drifts
ORDER BY run, seq;
