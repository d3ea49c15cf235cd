SELECT run, target, proposed_id AS token, count(*) FILTER (outcome IN ('accepted', 'rejected')) AS judged,
    count(*) FILTER (outcome = 'accepted') AS accepted
FROM decisions WHERE translation = 'ngram' GROUP BY ALL
