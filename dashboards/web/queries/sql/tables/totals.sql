SELECT run, count(*) AS prompts, list_sort(list(DISTINCT target)) AS targets, sum(emitted)::BIGINT AS tokens,
    sum(accepted)::BIGINT AS accepted, sum(judged)::BIGINT AS judged,
    sum(lookup_blocks) / nullif(sum(blocks), 0) AS copied_share,
    sum(emitted) / nullif(sum(blocks), 0) AS efficiency,
    sum(emitted) / nullif(max(finished) - min(started), 0) AS speed
FROM prompts GROUP BY run
