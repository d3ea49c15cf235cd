-- As store/query/sql/_ledger.sql. Updates whose reason begins with "idle" took time from nobody.
WITH scored AS (SELECT run, sum(seconds::DOUBLE) AS seconds FROM recalls GROUP BY run)
SELECT updates.run, count(*) FILTER (part = 'drafter') AS updates, sum(updates.seconds::DOUBLE) AS update_seconds,
    coalesce(any_value(scored.seconds), 0) AS recall_seconds, update_seconds + recall_seconds AS seconds,
    count(*) FILTER (part = 'drafter' AND served) AS served, count(*) FILTER (part = 'head' AND served) AS heads,
    coalesce(sum(updates.seconds::DOUBLE) FILTER (starts_with(reason, 'idle: ')), 0) AS idle_seconds,
    sum(waited::DOUBLE) AS waited, coalesce(sum(tokens_gained), 0) AS tokens_gained,
    max_by(acceptance_baseline, seq) FILTER (acceptance_after IS NOT NULL) AS predicted_loaded,
    max_by(if(served, acceptance_after, acceptance_before), seq) FILTER (acceptance_after IS NOT NULL) AS predicted
FROM updates LEFT JOIN scored USING (run) GROUP BY updates.run
