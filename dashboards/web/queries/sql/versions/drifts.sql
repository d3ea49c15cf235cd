SELECT run, "offset", target, dataset, direction, action, rate_before, rate_after
FROM drifts WHERE action IN ('reset', 'recall')
QUALIFY row_number() OVER (PARTITION BY run ORDER BY seq DESC) <= {most} ORDER BY run, seq
