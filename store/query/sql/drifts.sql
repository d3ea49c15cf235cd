-- every drift alarm: position, estimated start of the fall, rates and response, and all of it in a sentence
SELECT
    run,
    "offset",
    target,
    dataset,
    detector,
    changed_at,
    rate_before,
    rate_after,
    rate_after - rate_before AS change,
    action,
    action IN ('reset', 'recall') AS acted_upon,
    description
FROM drifts
ORDER BY run, seq;
