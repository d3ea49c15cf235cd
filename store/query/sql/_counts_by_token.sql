-- computes the table counts_by_token of store/log/schema.py from decisions
SELECT
    run,
    min("offset") AS "offset",
    target,
    outcome,
    proposed_id,
    min(proposed_bytes) AS proposed_bytes,
    emitted_id,
    min(emitted_bytes) AS emitted_bytes,
    count(*)::INTEGER AS decisions
FROM decisions
WHERE outcome IN ('accepted', 'rejected')
GROUP BY run, target, outcome, proposed_id, emitted_id
