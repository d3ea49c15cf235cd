SELECT updates.run, serving.version, count(*) FILTER (part = 'drafter') AS steps,
    count(*) FILTER (part = 'drafter' AND updates.served) AS served,
    sum(seconds::DOUBLE) AS seconds, sum(tokens_gained) AS tokens_gained
FROM updates
ASOF JOIN serving
    ON updates.run = serving.run AND updates.target = serving.target AND updates."offset" > serving.since
GROUP BY ALL
