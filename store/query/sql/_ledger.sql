-- costs and gains of learning, in seconds, for one run
--
-- Each further accepted token saves its sequence's share of a target forward of the batch. Updates took
-- `update_seconds` on the learner's own thread; decoding waited for `waited_seconds` of them. After drifts earlier
-- versions were scored in `recall_seconds`. The drafter `predicted_loaded` of the tokens of held-out prompts as it was
-- loaded, and predicts `predicted` of them now (null without updates that compared them).
WITH learning AS (
    SELECT
        coalesce(sum(seconds::DOUBLE), 0) AS update_seconds,
        coalesce(sum(waited::DOUBLE), 0) AS waited_seconds,
        coalesce(sum(tokens_gained), 0) AS tokens_gained,
        max_by(acceptance_baseline, seq) FILTER (acceptance_after IS NOT NULL) AS predicted_loaded,
        max_by(if(served, acceptance_after, acceptance_before), seq) FILTER (acceptance_after IS NOT NULL) AS predicted
    FROM updates
),

scored AS (
    SELECT coalesce(sum(seconds::DOUBLE), 0) AS recall_seconds FROM recalls
),

forwards AS (
    SELECT sum(seconds_verify::DOUBLE) / nullif(count(*), 0) AS seconds_per_target_forward FROM blocks
)

SELECT
    *,
    tokens_gained * seconds_per_target_forward AS seconds_saved,
    seconds_saved - update_seconds - recall_seconds AS net_seconds
FROM learning, scored, forwards;
