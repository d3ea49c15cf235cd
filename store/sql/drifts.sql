-- every drift alarm: where it was raised and since when, in which direction, how far, and what was done about it
SELECT
    run,
    "offset",
    target,
    dataset,
    detector,
    direction,
    changed_at,
    rate_before,
    rate_after,
    rate_after - rate_before AS change,
    action,
    action IN ('reset', 'recall') AS acted_upon
FROM drifts
ORDER BY run, seq;
