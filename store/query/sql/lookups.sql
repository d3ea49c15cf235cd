-- target forwards of each dataset by draft source (model, lookup, memory), with accepted and emitted tokens
SELECT
    run,
    dataset,
    drafter,
    count(*) AS target_forwards,
    target_forwards / sum(count(*)) OVER (PARTITION BY run, dataset) AS share_of_forwards,
    sum(drafted - candidates)::BIGINT AS drafted_pieces,
    sum(candidates)::BIGINT AS candidates,
    sum(judged)::BIGINT AS judged,
    sum(accepted)::BIGINT AS accepted,
    sum(accepted) / nullif(sum(judged), 0) AS acceptance_rate,
    sum(emitted) / count(*) AS block_efficiency
FROM blocks
GROUP BY run, dataset, drafter
ORDER BY run, min("offset"), drafter;
