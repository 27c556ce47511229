-- Of the first $2 due records, moves those that outlive the edge, $1 microseconds ago, to their expiry.
WITH due AS MATERIALIZED (
    SELECT
        ctid AS address,
        expires_at,
        c.edge
    FROM
        (SELECT clock_timestamp() - $1 * interval '1 microsecond' AS edge) AS c
        CROSS JOIN LATERAL (
            SELECT
                ctid,
                expires_at
            FROM onceward_record
            WHERE purge_after <= c.edge
            ORDER BY purge_after
            LIMIT $2
        ) AS r
),
alive AS MATERIALIZED (
    SELECT r.ctid AS address
    FROM
        due
        JOIN onceward_record AS r ON r.ctid = due.address
    WHERE due.expires_at > due.edge OR due.expires_at IS NULL
    FOR UPDATE OF r SKIP LOCKED
)
UPDATE onceward_record AS r
SET purge_after = coalesce(r.expires_at, clock_timestamp() + r.retention * interval '1 microsecond')
FROM alive
WHERE r.ctid = alive.address
