-- The emitted tokens before a position are the context of a candidate there: it is judged only if all were emitted.
WITH bounds AS (SELECT run, max("offset") - {prompts} AS seen_before FROM prompts GROUP BY run),
recent AS (
    SELECT decisions.* FROM decisions JOIN bounds ON bounds.run = decisions.run AND "offset" > seen_before
),
emitted AS (
    SELECT run, "offset", position, list(emitted_id) OVER before AS ids, list(emitted_bytes) OVER before AS parts
    FROM recent WHERE emitted_id IS NOT NULL
    WINDOW before AS (PARTITION BY run, "offset" ORDER BY position ROWS BETWEEN {spelt} PRECEDING AND 1 PRECEDING)
),
judged AS (
    SELECT recent.*, outcome = 'accepted' AS accepted, coalesce(context, 0) AS matched,
        coalesce(ids, []) AS ids, coalesce(parts, []) AS parts, greatest(len(ids) - matched, 0) + 1 AS first
    FROM recent LEFT JOIN emitted USING (run, "offset", position)
    WHERE proposed_id IS NOT NULL AND outcome IN ('accepted', 'rejected', 'alternative')
)
