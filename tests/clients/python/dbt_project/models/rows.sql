{{ config(materialized='table', partition_by={'field': 'day', 'data_type': 'date'}, cluster_by=['model'], labels={'team': 'finance'}) }}
select model, price, since as day, timestamp(since) as moment from {{ ref('prices') }}
