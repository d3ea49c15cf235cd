-- the 20 prompts of each run with the fewest tokens per second between admission and completion
SELECT
    run,
    dataset,
    "offset",
    prompt_id,
    prompt_tokens,
    emitted,
    finished - started AS seconds,
    emitted / nullif(finished - started, 0) AS tokens_per_second,
    accepted / nullif(judged, 0) AS acceptance_rate,
    left(prompt_text, 60) AS prompt_start
FROM prompts
WHERE emitted > 0
QUALIFY row_number() OVER (PARTITION BY run ORDER BY tokens_per_second NULLS LAST, "offset") <= 20
ORDER BY run, tokens_per_second NULLS LAST, "offset";
