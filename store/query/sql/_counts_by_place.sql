-- computes the table counts_by_place of store/log/schema.py from decisions
SELECT
    run,
    min("offset") AS "offset",
    dataset,
    target,
    drafter,
    translation,
    index,
    len(pieces)::INTEGER AS pieces_count,
    outcome,
    count(*)::INTEGER AS decisions,
    sum(drafter_levels[1]::DOUBLE) AS drafter_level_sum,
    sum(target_levels[1]::DOUBLE) AS target_level_sum
FROM decisions
GROUP BY run, dataset, target, drafter, translation, index, pieces_count, outcome
