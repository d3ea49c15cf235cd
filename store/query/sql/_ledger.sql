-- costs and gains of learning, in seconds, for each run
--
-- Each further accepted token saves its sequence's share of a target forward of the batch. Updates took
-- `update_seconds` on the learner's own thread, `idle_seconds` of them while no request ran, which cost nothing;
-- decoding waited for `waited_seconds`. After drifts earlier versions were scored in `recall_seconds`. The drafter
-- `predicted_loaded` of the tokens of held-out prompts as it was loaded, and predicts `predicted` of them now (null
-- without updates that compared them). `updates` of the drafter, `served` of which passed the gate, and of the `heads`.
WITH learning AS (
    SELECT
        run,
        count(*) FILTER (part = 'drafter') AS updates,
        count(*) FILTER (part = 'drafter' AND served) AS served,
        count(*) FILTER (part = 'head' AND served) AS heads,
        sum(seconds::DOUBLE) AS update_seconds,
        coalesce(sum(seconds::DOUBLE) FILTER (starts_with(reason, 'idle: ')), 0) AS idle_seconds,
        sum(waited::DOUBLE) AS waited_seconds,
        coalesce(sum(tokens_gained), 0) AS tokens_gained,
        max_by(acceptance_baseline, seq) FILTER (acceptance_after IS NOT NULL) AS predicted_loaded,
        max_by(if(served, acceptance_after, acceptance_before), seq) FILTER (acceptance_after IS NOT NULL) AS predicted
    FROM updates
    GROUP BY run
),

scored AS (
    SELECT run, sum(seconds::DOUBLE) AS recall_seconds FROM recalls GROUP BY run
),

forwards AS (
    SELECT run, sum(seconds_verify::DOUBLE) / nullif(count(*), 0) AS seconds_per_target_forward
    FROM blocks
    GROUP BY run
)

SELECT
    run,
    updates,
    served,
    heads,
    update_seconds,
    idle_seconds,
    waited_seconds,
    tokens_gained,
    predicted_loaded,
    predicted,
    coalesce(scored.recall_seconds, 0) AS recall_seconds,
    seconds_per_target_forward,
    tokens_gained * seconds_per_target_forward AS seconds_saved,
    seconds_saved - update_seconds + idle_seconds - coalesce(scored.recall_seconds, 0) AS net_seconds
FROM learning
LEFT JOIN scored USING (run)
LEFT JOIN forwards USING (run);
