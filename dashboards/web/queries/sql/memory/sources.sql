SELECT run, drafter AS source, count(*) AS judged, count(*) FILTER (accepted) AS accepted,
    avg(matched) FILTER (accepted AND context IS NOT NULL) AS matched
FROM judged GROUP BY run, drafter ORDER BY run, source
