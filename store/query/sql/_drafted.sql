-- where the tokens of each run came from, and how many answers ended by their length
SELECT
    run,
    sum(emitted)::BIGINT AS emitted,
    sum(accepted)::BIGINT AS model,
    sum(own_accepted)::BIGINT AS own,
    sum(lookup_accepted - own_accepted)::BIGINT AS memory,
    count(*) AS prompts,
    count(*) FILTER (finish = 'length') AS ended_by_length
FROM prompts
GROUP BY run
ORDER BY run;
