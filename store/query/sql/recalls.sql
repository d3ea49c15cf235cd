-- every scoring of earlier versions after a drift: their acceptance, and the version that was restored, if any
SELECT
    run,
    "offset",
    target,
    version,
    candidates,
    prompts,
    acceptance_present,
    acceptance_best,
    acceptance_best - acceptance_present AS lead,
    seconds
FROM recalls
ORDER BY run, seq;
