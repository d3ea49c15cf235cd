SELECT run, coalesce(sum(accepted) FILTER (drafter = 'model'), 0)::BIGINT AS model,
    coalesce(sum(accepted) FILTER (drafter = 'lookup'), 0)::BIGINT AS lookup,
    coalesce(sum(accepted) FILTER (drafter = 'memory'), 0)::BIGINT AS memory,
    sum(seconds_verify::DOUBLE) / count(*) AS seconds_per_target_forward
FROM blocks GROUP BY run
