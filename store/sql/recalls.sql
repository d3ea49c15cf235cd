-- every time that earlier versions were scored after a drift: how they did, and which one was taken back, if any
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
