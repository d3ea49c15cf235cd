-- the 20 longest stretches of accepted tokens in each run, across blocks, with their ids and text
WITH stretches AS (
    -- an emitted token that was not accepted ends a stretch; a bonus token, after a full acceptance, is skipped
    SELECT
        *,
        count(*) FILTER (origin = 'residual') OVER (PARTITION BY run, "offset" ORDER BY position) AS stretch
    FROM tokens
)

SELECT
    run,
    dataset,
    "offset",
    prompt_id,
    min(position) AS first_position,
    count(*) AS accepted_tokens,
    list(token_id ORDER BY position) AS token_ids,
    string_agg(text, '' ORDER BY position) AS text
FROM stretches
WHERE origin = 'accepted'
GROUP BY run, dataset, "offset", prompt_id, stretch
QUALIFY row_number() OVER (PARTITION BY run ORDER BY accepted_tokens DESC, "offset", first_position) <= 20
ORDER BY run, accepted_tokens DESC, "offset", first_position;
