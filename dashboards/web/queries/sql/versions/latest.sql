-- If two versions were published after the same prompt, the later one served. This happens if a drift is detected with
-- the prompt after the last one of an interval.
WITH latest AS (
    SELECT *, CASE WHEN parent IS NULL THEN -1 ELSE "offset" END AS since
    FROM versions QUALIFY row_number() OVER (PARTITION BY run ORDER BY seq DESC) <= {most}
),
serving AS (
    SELECT * FROM latest QUALIFY row_number() OVER (PARTITION BY run, target, since ORDER BY version DESC) = 1
)
