SELECT run, min("offset") AS "offset", max("offset") AS last, count(*) AS steps, count(*) FILTER (served) AS served,
    sum(seconds::DOUBLE) AS seconds, sum(tokens_gained) AS tokens_gained, max(drafter_version) AS drafter_version,
    -- of the tokens of held-out prompts, after the last of these updates
    max_by(acceptance_baseline, seq) FILTER (acceptance_after IS NOT NULL) AS predicted_loaded,
    max_by(if(served, acceptance_after, acceptance_before), seq) FILTER (acceptance_after IS NOT NULL) AS predicted
FROM updates WHERE part = 'drafter'
GROUP BY run, "offset" // {window}, served ORDER BY run, 2
