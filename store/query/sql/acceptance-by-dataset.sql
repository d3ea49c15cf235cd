-- prompts, tokens, block efficiency of each dataset; acceptance rate and mean accepted length of what the model drafted
SELECT
    run,
    dataset,
    count(*) AS prompts,
    sum(emitted)::BIGINT AS emitted_tokens,
    sum(blocks)::BIGINT AS target_forwards,
    sum(judged)::BIGINT AS judged,
    sum(accepted) / nullif(sum(judged), 0) AS acceptance_rate,
    sum(accepted) / nullif(sum(blocks - lookup_blocks), 0) AS mean_accepted_length,
    sum(emitted) / nullif(sum(blocks), 0) AS block_efficiency
FROM prompts
GROUP BY run, dataset
ORDER BY run, min("offset");
