SELECT run, drafter AS source, matched, count(*) AS judged, count(*) FILTER (accepted) AS accepted,
    avg(chance::DOUBLE) AS chance
FROM judged WHERE context IS NOT NULL GROUP BY run, drafter, matched ORDER BY run, source, matched
