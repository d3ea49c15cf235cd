SELECT run, min("offset") AS "offset", max("offset") AS last, count(*) AS steps, count(*) FILTER (served) AS served,
    sum(seconds::DOUBLE) AS seconds, sum(tokens_gained) AS tokens_gained, max(drafter_version) AS drafter_version
FROM updates WHERE part = 'drafter'
GROUP BY run, "offset" // {window}, served ORDER BY run, 2
