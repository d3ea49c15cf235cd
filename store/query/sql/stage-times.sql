-- seconds in decode, translate, verify and learning, and milliseconds per block, per dataset
WITH stages AS (
    SELECT
        run,
        dataset,
        min("offset") AS first_offset,
        count(*) AS blocks,
        {
            'decode': sum(seconds_decode::DOUBLE),
            'translate': sum(seconds_translate::DOUBLE),
            'verify': sum(seconds_verify::DOUBLE)
        } AS seconds
    FROM blocks
    GROUP BY run, dataset
),

learning AS (
    SELECT updates.run, prompts.dataset, sum(updates.seconds::DOUBLE) AS learn
    FROM updates
    ASOF JOIN prompts ON prompts.run = updates.run AND updates."offset" >= prompts."offset"
    GROUP BY ALL
)

SELECT
    run,
    dataset,
    blocks,
    seconds.decode AS seconds_decode,
    seconds.translate AS seconds_translate,
    seconds.verify AS seconds_verify,
    coalesce(learn, 0) AS seconds_learn,
    1000 * seconds_decode / blocks AS ms_decode_per_block,
    1000 * seconds_translate / blocks AS ms_translate_per_block,
    1000 * seconds_verify / blocks AS ms_verify_per_block,
    seconds_translate / nullif(seconds_verify, 0) AS translate_to_verify
FROM stages
LEFT JOIN learning USING (run, dataset)
ORDER BY run, first_offset;
