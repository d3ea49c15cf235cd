SELECT run, "offset", target, version, candidates, prompts, acceptance_present, acceptance_best,
    count(*) OVER () AS total
FROM recalls
