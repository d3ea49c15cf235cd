-- where the tokens of each run came from, how many answers ended by their length, and in how many passes drafts rested
WITH passes AS (
    SELECT
        run,
        count(*) AS passes,
        count(*) FILTER (drafted = 0) AS resting,
        count(*) FILTER (drafted > 0 AND drafter = 'model') AS drafts,
        avg(accepted) FILTER (drafted > 0 AND drafter = 'model') AS added,
        median(seconds_decode + seconds_translate) FILTER (drafted > 0 AND drafter = 'model') AS drafting,
        median(seconds_verify) FILTER (drafted = 0 AND block > 0) AS plain  -- the first one reads the prompt
    FROM blocks
    GROUP BY run
)

SELECT
    run,
    sum(emitted)::BIGINT AS emitted,
    sum(accepted)::BIGINT AS model,
    sum(own_accepted)::BIGINT AS own,
    sum(lookup_accepted - own_accepted)::BIGINT AS memory,
    count(*) AS prompts,
    count(*) FILTER (finish = 'length') AS ended_by_length,
    any_value(resting / passes) AS resting,
    any_value(drafts) AS drafts,
    any_value(added) AS added,
    any_value(drafting / nullif(plain, 0)) AS draft_passes
FROM prompts
LEFT JOIN passes USING (run)
GROUP BY run
ORDER BY run;
