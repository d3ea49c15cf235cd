-- the 20 longest stretches of accepted tokens in each run, across blocks, with ids and text of all their tokens
WITH stretches AS (
    -- a residual ends a stretch; a bonus token, after a full acceptance, belongs to it but is not counted
    SELECT
        *,
        count(*) FILTER (origin = 'residual') OVER (PARTITION BY run, "offset" ORDER BY position) AS stretch
    FROM tokens
),

-- from the first accepted token of a stretch to its last one, and the bonus token after it
trimmed AS (
    SELECT *
    FROM stretches
    WHERE origin <> 'residual'
    QUALIFY position BETWEEN
        min(position) FILTER (origin = 'accepted') OVER (PARTITION BY run, "offset", stretch)
        AND max(position) FILTER (origin = 'accepted') OVER (PARTITION BY run, "offset", stretch) + 1
)

SELECT
    run,
    dataset,
    "offset",
    prompt_id,
    min(position) AS first_position,
    count(*) FILTER (origin = 'accepted') AS accepted_tokens,
    list(token_id ORDER BY position) AS token_ids,
    string_agg(text, '' ORDER BY position) AS text
FROM trimmed
GROUP BY run, dataset, "offset", prompt_id, stretch
QUALIFY row_number() OVER (PARTITION BY run ORDER BY accepted_tokens DESC, "offset", first_position) <= 20
ORDER BY run, accepted_tokens DESC, "offset", first_position;
