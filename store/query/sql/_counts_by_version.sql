-- computes the table counts_by_version of store/log/schema.py from decisions
SELECT
    run,
    min("offset") AS "offset",
    max("offset") AS last_offset,
    dataset,
    target,
    drafter,
    drafter_version,
    outcome,
    count(*)::INTEGER AS decisions
FROM decisions
GROUP BY run, dataset, target, drafter, drafter_version, outcome
