-- A tree is counted for the source of its first candidate.
SELECT run, min("offset") AS first, max("offset") AS last,
    coalesce(sum(accepted) FILTER (drafter = 'model'), 0) / count(*) AS model,
    coalesce(sum(accepted) FILTER (drafter = 'lookup'), 0) / count(*) AS lookup,
    coalesce(sum(accepted) FILTER (drafter = 'memory'), 0) / count(*) AS memory
FROM blocks GROUP BY run, "offset" // {window} ORDER BY run, first
