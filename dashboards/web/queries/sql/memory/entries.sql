, entries AS (
    SELECT run, target, drafter AS source, proposed_id, matched, list_slice(ids, first, len(ids)) AS context,
        any_value(list_slice(parts, first, len(parts))) AS parts, any_value(proposed_bytes) AS proposed_bytes,
        count(*) AS judged, count(*) FILTER (accepted) AS accepted,
        avg(chance::DOUBLE) AS chance, max("count") AS seen, max("offset") AS "offset"
    FROM judged GROUP BY ALL
)
SELECT *, count(*) OVER () AS total FROM entries
WHERE accepted > 0 AND {condition} ORDER BY accepted DESC, run, source, context, proposed_id LIMIT {most}
