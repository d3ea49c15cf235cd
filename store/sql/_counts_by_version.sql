-- what store/rollups.py keeps as counts_by_version, from decisions
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
