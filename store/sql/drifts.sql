-- every drift alarm: where, in which direction, how far, and what was done about it
SELECT run, "offset", dataset, detector, direction, rate_before, rate_after, rate_after - rate_before AS change, action
FROM drifts
ORDER BY run, seq;
